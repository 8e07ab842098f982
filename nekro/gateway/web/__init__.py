"""How requests are received and answers sent: the server, middlewares, paths, pages of lists."""
