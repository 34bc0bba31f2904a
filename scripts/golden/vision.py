"""Makes policy/tests/golden/vision: what transformers' image processor, torch's resize and PIL make of small images.

    pip install torch torchvision transformers pillow
    python scripts/golden/vision.py policy/tests/golden/vision

Pixels follow from a formula that the test has too, results are kept as SHA-256; files of many kinds
are kept with the RGB pixels that PIL reads from them.
"""
import hashlib
import json
import random
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

out = Path(sys.argv[1])
out.mkdir(parents=True, exist_ok=True)
rng = random.Random(11)


def pixels(width, height, seed):
    """Noise for an even seed, black and white for an odd one."""
    i = np.arange(width * height * 3, dtype=np.uint64)
    noise = ((i * i * 31 + i * 57 + seed * 101) >> 3) & 255
    return np.where(seed % 2 == 1, np.where(noise > 127, 255, 0), noise).astype(np.uint8).reshape(height, width, 3)


def sha(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


resizes = []
sizes = [(1, 1), (1, 7), (5, 1), (31, 33), (64, 64), (96, 64), (97, 64), (96, 65), (200, 3), (3, 200), (640, 9), (17, 300)]
for seed, size in enumerate(sizes):
    for to in [size, (1, 1), (32, 32), (size[0], 40), (40, size[1]), (64, 160), (257, 2)] + [(rng.randint(1, 200), rng.randint(1, 200)) for _ in range(3)]:
        image = torch.from_numpy(pixels(*size, seed)).permute(2, 0, 1)
        resized = F.resize(image, [to[1], to[0]], interpolation=F.InterpolationMode.BICUBIC, antialias=True)
        resizes.append({"from": size, "seed": seed, "to": to, "sha256": sha(resized.permute(1, 2, 0).numpy())})

processors = {
    "qwen3_5": dict(patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
                    size={"shortest_edge": 4096, "longest_edge": 25600}),
    "clip": dict(patch_size=14, min_pixels=784, max_pixels=7840),
    "odd": dict(patch_size=4, merge_size=3, temporal_patch_size=1, rescale_factor=1 / 200, image_mean=[0.1, 0.2, 0.3],
                image_std=[0.5, 0.4, 0.7], size={"shortest_edge": 300, "longest_edge": 4000}),
}
processed = []
for name, settings in processors.items():
    processor = Qwen2VLImageProcessor(**settings)
    for seed, size in enumerate([(150, 100), (96, 64), (33, 65), (5, 900), (400, 300), (16, 16), (48, 48), (80, 112), (7, 5)]):
        found = processor(images=Image.fromarray(pixels(*size, seed)), return_tensors="pt")
        grid = found["image_grid_thw"][0].tolist()
        processed.append({"processor": name, "size": size, "seed": seed, "grid": grid, "sha256": sha(found["pixel_values"].numpy())})

budgets = []
sides = [1, 15, 16, 17, 31, 32, 48, 49, 80, 112, 143, 144, 145, 200, 201, 1000, 3200, 6400, 6401]
pairs = [(w, h) for w in sides for h in sides]
pairs += [(rng.randint(1, 5000), rng.randint(1, 5000)) for _ in range(200)]
for w, h in pairs:
    factor, least, most = rng.choice([(32, 4096, 25600), (32, 65536, 16777216), (28, 3136, 1003520), (12, 300, 4000), (32, 1024, 1024)])
    try:
        high, wide = smart_resize(h, w, factor, least, most)
        to = [wide, high]
    except ValueError:
        to = None
    budgets.append([w, h, factor, least, most, to])


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def raw_png(width, height, depth, colour, rows, extra=b"", interlaced=0):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def data(count, salt):
    return bytes((i * i * 7 + i * 13 + salt) % 256 for i in range(count))


files = {}
base = Image.fromarray(pixels(13, 9, 4))
for mode in ["1", "L", "LA", "RGB", "RGBA"]:
    image = base.convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(base.convert("L").rotate(180))
    image.save(out / f"{mode}.png")
base.quantize(200).save(out / "P8.png")
base.quantize(7).save(out / "P4.png", bits=4)
base.quantize(5).save(out / "P-transparent.png", transparency=bytes([0, 128, 255]))
for depth in (1, 2, 4, 16):
    rows = [data((13 * depth + 7) // 8, y) for y in range(9)]
    (out / f"grey{depth}.png").write_bytes(raw_png(13, 9, depth, 0, rows))
for depth in (1, 2, 4, 8):
    rows = [data((13 * depth + 7) // 8, y) for y in range(9)]
    palette = data(3 * min(2**depth - 1, 100), 5)
    (out / f"short-palette{depth}.png").write_bytes(raw_png(13, 9, depth, 3, rows, chunk(b"PLTE", palette)))
for colour, channels in ((2, 3), (4, 2), (6, 4)):
    rows = [data(13 * channels * 2, y) for y in range(9)]
    (out / f"deep{channels}.png").write_bytes(raw_png(13, 9, 16, colour, rows))
for colour, depth, channels in ((2, 8, 3), (0, 1, 1), (3, 4, 1)):
    samples = np.array([list(data(13 * channels, y)) for y in range(9)]).reshape(9, 13, channels) % 2**depth
    rows = []
    for y, x, down, right in ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)):
        for line in samples[y::down, x::right]:
            bits = "".join(format(sample, f"0{depth}b") for sample in line.flatten())
            bits += "0" * (-len(bits) % 8)
            rows.append(bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)))
    png = raw_png(13, 9, depth, colour, rows, chunk(b"PLTE", data(48, 3)) if colour == 3 else b"", interlaced=1)
    (out / f"interlaced{colour}.png").write_bytes(png)
rows = [data(13 * 3, y) for y in range(9)]
(out / "key.png").write_bytes(raw_png(13, 9, 8, 2, rows, chunk(b"tRNS", struct.pack(">HHH", *rows[0][:3]))))
smooth = Image.fromarray(np.fromfunction(lambda y, x, c: (x * 5 + y * 3 * (c + 1)) % 256, (37, 45, 3)).astype(np.uint8))
smooth = smooth.resize((90, 74), Image.Resampling.BICUBIC)
for name, options in {"420": dict(subsampling=2), "444": dict(subsampling=0), "progressive": dict(progressive=True)}.items():
    smooth.save(out / f"{name}.jpg", quality=90, **options)
smooth.convert("L").save(out / "grey.jpg", quality=90)
smooth.convert("CMYK").save(out / "cmyk.jpg", quality=90)
for path in sorted(out.iterdir()):
    if path.suffix in (".png", ".jpg") and path.name != "cmyk.jpg" and not path.name.startswith("as-"):
        rgb = Image.open(path).convert("RGB")
        if path.suffix == ".jpg":
            rgb.save(out / f"as-{path.stem}.png")
        files[path.name] = {"size": rgb.size, "sha256": sha(np.array(rgb))}
golden = {"resizes": resizes, "processors": processors, "processed": processed, "budgets": budgets, "files": files}
text = json.dumps(golden).replace("}, {", "},\n{").replace("], [", "],\n[")
(out / "golden.json").write_text(text + "\n")
