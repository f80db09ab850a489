"""Model weights in the files that `from_pretrained` reads, and into models, meta-device ones included."""
