"""Model families, one file each: settings for the Megatron engine and the table of a layer. docs/models.md says how to add one."""
