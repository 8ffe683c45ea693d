"""Searches over options: `sweep`, a grid or random draws; `tune`, equal budgets for methods by successive halving.

Everything is chosen by held-out images. Test images are scored only where that is asked for; nothing is chosen by them.
"""
