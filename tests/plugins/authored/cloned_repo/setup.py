raise RuntimeError("not a plugin: must not be imported")
