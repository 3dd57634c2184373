# SPDX-License-Identifier: Apache-2.0
"""Image processor copied into tiny multimodal checkpoints; not used from here."""

import math

import numpy as np
import torch
from PIL import Image
from transformers import BaseImageProcessor, BatchFeature


class TinyK3ImageProcessor(BaseImageProcessor):
    """Cuts images into patches at their native aspect ratio.

    An image is scaled down until it fits the patch limits, padded at the right and the
    bottom to whole merge windows, normalised and cut into patches, row by row.
    """

    model_input_names = ["pixel_values", "grid_thws"]

    def __init__(self, media_proc_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg or {}

    def _size(self, image):
        """Scaled (width, height) and the patch grid (columns, rows) after padding."""
        cfg = self.media_proc_cfg
        patch, merge = cfg["patch_size"], cfg["merge_kernel_size"]
        side = cfg["patch_limit_on_one_side"] * patch
        width, height = image.size
        area = max(1.0, width // patch) * max(1.0, height // patch)
        scale = min(
            1.0,
            math.sqrt(cfg["in_patch_limit"] / area),
            side / width,
            side / height,
        )
        scaled = tuple(max(1, min(side, int(n * scale))) for n in (width, height))
        grid = tuple(math.ceil(n / (patch * merge)) * merge for n in scaled)
        return scaled, grid

    def media_tokens_calculator(self, media):
        """Embedding slots of one media dict ``{"type": "image", "image": PIL}``."""
        _, (columns, rows) = self._size(media["image"])
        return columns * rows // self.media_proc_cfg["merge_kernel_size"] ** 2

    def preprocess(self, medias, return_tensors=None, **kwargs):
        """Patches [n, 3, patch, patch] of all images and their grids [images, 3]."""
        cfg = self.media_proc_cfg
        patch = cfg["patch_size"]
        mean, std = (np.array(cfg[k], np.float32) for k in ("image_mean", "image_std"))
        patches, grids = [], []
        for media in medias:
            scaled, (columns, rows) = self._size(media["image"])
            image = media["image"].convert("RGB").resize(scaled, Image.Resampling.BICUBIC)
            pixels = np.zeros((rows * patch, columns * patch, 3), np.float32)
            pixels[: scaled[1], : scaled[0]] = np.asarray(image, np.float32) / 255.0
            pixels = (pixels - mean) / std
            pixels = pixels.reshape(rows, patch, columns, patch, 3)
            pixels = pixels.transpose(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)
            patches.append(torch.from_numpy(np.ascontiguousarray(pixels)))
            grids.append([1, rows, columns])
        return BatchFeature(
            {
                "pixel_values": torch.cat(patches),
                "grid_thws": torch.tensor(grids, dtype=torch.int64),
            },
            tensor_type=return_tensors,
        )
