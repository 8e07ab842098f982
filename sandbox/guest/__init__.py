"""What runs inside a sandbox: standard library only, handed over as text, trusted by nobody."""
