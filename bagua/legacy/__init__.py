"""What only code written for Bagua 0.9 uses: its autotune service, helper functions, and methods of torch's classes.

Nothing else needs this package. `bagua.torch_api` and `bagua.distributed` install it when they are imported, each with
one call, and files at the paths of 0.9 name what is here: bagua.bagua_define, bagua.service, and tensor and utils in
bagua.torch_api. Without those calls and files, the package can be deleted.
"""
