"""Images: where they come from, how they are masked and augmented, how a run stores them."""
