"""Device code in CuTe DSL, and nothing else. Imported only by a process that compiles."""
