"""What is done to a model from outside so that many ranks train it: one file an axis, and apply.py in order."""
