"""The two KV caches, a decoder that runs on either, and what loads a model for it; imports nothing by itself.

NumPy is all that is needed, but for `weights`, `tokenizer` and `model`: these need the extra `model`.
"""
