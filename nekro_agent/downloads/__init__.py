"""Downloads: complete files or none, resumed after cuts and crashes."""
