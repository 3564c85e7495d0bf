"""What a session measures beside the recorded step: loaders, inputs, growth."""
