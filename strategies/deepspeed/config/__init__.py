"""DeepSpeed as users ask for it: the plugin, the config file, the environment, ``"auto"`` values."""
