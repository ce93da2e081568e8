from __future__ import annotations

import torch

from torch_pagoda.runtime.blocks import CacheCopy
from torch_pagoda.runtime.cache.block_copier import BlockCopier


def test_chained_copies_are_made_one_after_the_other() -> None:
    blocks = torch.arange(5.0)[:, None].repeat(1, 3)  # block i holds i
    copier = BlockCopier([(blocks, blocks.clone())], [], [0])
    copier.run([CacheCopy("move", 0, source, target) for source, target in ((0, 1), (1, 2), (4, 3), (3, 4), (0, 3))])
    assert blocks[:, 0].tolist() == [0, 0, 0, 0, 4]
