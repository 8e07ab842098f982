"""Files between plugins and sandboxed code, and safe access to what sandboxed code can write."""
