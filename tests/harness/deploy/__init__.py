"""The chart and the images, as whoever deploys them has them."""
