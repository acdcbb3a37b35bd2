"""FSDP as users ask for it: the plugin, the environment, and the strict settings they become."""
