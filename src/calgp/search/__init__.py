"""Many runs (`jobs`), here or on Ray (`engines`), and searches over options.

`sweep` is a grid or random draws; `tune` gives methods equal budgets, by successive halving.
Everything is chosen by held-out images. Test images are scored only where that is asked for; nothing is chosen by them.
"""
