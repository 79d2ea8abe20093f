"""What runs on the caches: a decoder, a real model with its file and tokens, searches and a scheduler."""
