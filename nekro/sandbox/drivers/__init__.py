"""The sandbox drivers: bubblewrap, container, landlock and unsafe, behind one protocol."""
