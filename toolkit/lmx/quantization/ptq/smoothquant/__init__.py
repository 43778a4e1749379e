"""SmoothQuant, and the layers between which it moves scales."""
