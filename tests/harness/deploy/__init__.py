"""The chart and the images, as an operator has them."""
