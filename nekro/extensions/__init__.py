"""What can be left out: each extension brings its routes and services."""
