"""Model families. To add one:

1. Write a file here with a `FAMILY`: `settings(hf_config)` gives the Megatron engine its numbers (`dense_settings` does most of
   it), `layer(hf_config, n)` lists the entries of decoder layer n. `dense.py` has the parts that decoders share; a new way to
   cut a tensor is a class beside those in `hybridflow/models/cuts.py`.
2. Add it to `FAMILIES` in `hybridflow/models/weight_map.py`, and its name to `hybridflow/config/model_facts.py`.
3. Add it to `FAMILIES` in `tests/models/test_checkpoint.py`: import, export and shards are then checked against plain torch.
"""
