"""The two KV caches, and attention on them; NumPy alone, so that the folder can be vendored."""
