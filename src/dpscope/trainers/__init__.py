"""How a step is made private: one trainer a method. Importing this package does not import torch."""
