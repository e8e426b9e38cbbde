"""The demo model: a tiny trained Qwen3 checkpoint beside the recipe that made it.

The folder itself is the checkpoint. The engine imports nothing from here; `train.py` needs
transformers and a GPU.
"""
