"""One file for each model: ``fit(trainer_options, batch_size)`` trains a small one for a few steps."""
