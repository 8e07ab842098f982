"""What the code of a chat is told about its plugins and methods: help, search, which plugins are awake."""
