"""Records small images for the tests of runtime/src/data/images.rs.

Needs Pillow. Run in this folder: python record.py. KIND.png are 5 rows of 7 pixels with the values (y·40 + x·10 + c·7) mod 256 in
channel c (of 16 bits: times 257; of a palette: grey); photo.jpg is a gradient of 24 by 16 pixels in JPEG, and photo.npy its pixels as
Pillow decodes them, u8 [24, 16, 3].
"""
import numpy as np
from PIL import Image

y, x, c = np.mgrid[0:5, 0:7, 0:4]
pixels = ((y * 40 + x * 10 + c * 7) % 256).astype(np.uint8)
Image.fromarray(pixels[..., :3], "RGB").save("rgb.png")
Image.fromarray(pixels, "RGBA").save("rgba.png")
Image.fromarray(pixels[..., 0], "L").save("grey.png")
Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save("deep.png")
Image.fromarray(pixels[..., 0], "L").convert("P").save("palette.png")
y, x = np.mgrid[0:24, 0:16]
photo = np.stack([y * 10, x * 15, 255 - y * 5 - x * 5], -1).astype(np.uint8)
Image.fromarray(photo, "RGB").save("photo.jpg", quality=90)
np.save("photo.npy", np.asarray(Image.open("photo.jpg").convert("RGB")))
