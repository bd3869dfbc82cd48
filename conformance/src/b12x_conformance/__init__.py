"""One set of tests that the core and every engine adapter of b12x must pass, and what they need."""
