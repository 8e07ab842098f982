"""The program inside a sandbox: standard library only, passed in as one file, not trusted by the host."""
