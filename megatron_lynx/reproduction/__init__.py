"""What two papers print, computed again: arXiv 2205.05198 and arXiv 2406.08756.

``published`` holds the printed figures with their sources, ``activations`` the bytes of Table 2,
``timing`` the layer of Table 4 and the model rows, ``overlap`` the comparison of planners;
``document`` and ``charts`` write down what they found.
"""
