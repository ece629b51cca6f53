"""Other libraries that can run on ringlab's attention."""
