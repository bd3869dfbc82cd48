"""From a problem to the configuration of a kernel: pure Python, without a GPU and without the compiler."""
