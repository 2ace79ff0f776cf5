"""The plots of the board's views. Importing one loads matplotlib.

A plot takes in a scene with `fit`, which says whether its axes must be redrawn, and draws its
lines or bars with `draw`, upon axes that are pixels already.
"""
