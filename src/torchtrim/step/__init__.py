"""One step of a program as tasks and tensors, what edits make of it, and the simulator that prices them."""
