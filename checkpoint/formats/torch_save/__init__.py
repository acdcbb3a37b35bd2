"""Files of ``torch.save``, and the pickles inside them."""
