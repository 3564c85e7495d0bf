"""Records a running program: operators, storages, saved tensors, modules, optimizers, syncs."""
