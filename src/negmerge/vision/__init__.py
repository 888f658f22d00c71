"""Images: data sets, reading, splits, transforms, networks and Grad-CAM.

This package may import `training` and the packages below it; the scenarios of images import it.
◄ ADD A DATA SET in `datasets.py`, A BACKBONE in `networks.py`.
"""
