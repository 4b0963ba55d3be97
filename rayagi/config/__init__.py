"""Configuration: from user input (files, options, RLlib configs) to a frozen, validated RunSpec."""
