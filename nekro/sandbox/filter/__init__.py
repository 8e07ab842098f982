"""The seccomp filter."""
