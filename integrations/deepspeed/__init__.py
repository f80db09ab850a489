"""DeepSpeed's ZeRO engine behind the contract of `strategies.api`; imported only when a run asks for it."""
