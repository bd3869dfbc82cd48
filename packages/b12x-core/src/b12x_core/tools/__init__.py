"""Programs for those who write kernels; nothing else imports them."""
