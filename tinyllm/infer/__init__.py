"""The two KV caches and a decoder that runs on either. Needs NumPy alone; imports nothing by itself."""
