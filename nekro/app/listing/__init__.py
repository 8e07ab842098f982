"""What the code of a chat can read about its plugins and methods: help, search, which plugins are awake."""
