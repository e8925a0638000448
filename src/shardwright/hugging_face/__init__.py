"""Models in the format of Hugging Face's `transformers`: config.json, safetensors files, tokenizer.

One file an architecture (`llama.py`, ...) has its table: the keys of config.json and the names of tensors, each beside
what they are here. Reading and writing use the same tables. Only `reader.py` and `writer.py` import torch.
"""
