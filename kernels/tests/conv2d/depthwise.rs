//! Depthwise convolutions whose results are as large as the image.

use super::*;

/// Several of them: groups of four images and of four channels, and others.
pub const DEPTHWISE: [Shape; 2] = [depthwise(7, 70, [7, 7], 3), depthwise(3, 6, [5, 11], 7)];

const fn depthwise(n: usize, groups: usize, hw: [usize; 2], k: usize) -> Shape {
    Shape {
        n,
        ci: groups,
        co: groups,
        hw,
        k: [k; 2],
        stride: [1; 2],
        pad: [k / 2; 2],
        dilation: [1; 2],
        groups,
        cut: [0; 2],
    }
}

/// Any layout, kernel and dilation.
#[test]
fn depthwise_as_large_as_the_image() {
    let (mut random, teams) = (Random(67), teams());
    for round in 0..40 {
        let groups = random.int(2, 9);
        let dilation = [random.int(1, 2), random.int(1, 2)];
        let half = [random.int(0, 3), random.int(0, 3)];
        let shape = Shape {
            hw: [random.int(1, 12), random.int(1, 20)],
            k: half.map(|half| 2 * half + 1),
            pad: [half[0] * dilation[0], half[1] * dilation[1]],
            dilation,
            groups,
            ..Shape::simple(random.int(1, 6), groups, groups, 0, 0, 0)
        };
        for kind in KINDS {
            check(&mut random, shape, kind, round % 4 > 0, &teams);
        }
    }
}
