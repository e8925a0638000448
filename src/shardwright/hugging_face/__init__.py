"""Models in the format of Hugging Face's `transformers`: config.json, safetensors files, tokenizer.

Each family of architectures has one file (`llama.py`, ...) with its tables: the keys of config.json and the names of
tensors, next to Shardwright's names. Reading and writing use the same tables. Only `reader.py` and `writer.py` import
torch.
"""
