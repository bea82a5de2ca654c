//! Non-maximum suppression: of boxes in order of preference, a box is kept unless it overlaps too
//! much with a better box that is kept.
//!
//! Boxes are processed in blocks. Within a block, each box is compared with those before it; the
//! kept boxes of the block are then compared with all later boxes in parallel. The result is that
//! of the sequential algorithm, for any number of threads.

use super::pointwise::{OperandView, aligned};
use super::{Config, Launch, SpecError};
use crate::size::Env;
use crate::spec::{Body, Spec};

/// Boxes of a block.
const BLOCK: usize = 64;
/// Later boxes that one worker compares with a block at a time.
const CHUNK: usize = 1 << 10;

/// See [`Body::NonMaxSuppression`].
pub(crate) struct NonMaxSuppression {
    boxes_max: usize,
}

/// Corners and area.
type Rect = [f32; 5];

impl NonMaxSuppression {
    pub fn new(spec: &Spec, bound: &Env, _config: &Config) -> Result<Self, SpecError> {
        Ok(NonMaxSuppression {
            boxes_max: spec.dims[0].usize_at(bound),
        })
    }

    pub fn workspace(&self) -> u64 {
        aligned(self.boxes_max * size_of::<Rect>()) as u64
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::NonMaxSuppression(suppress) = &spec.body else {
            unreachable!("checked by new")
        };
        let count = spec.dims[0].usize_at(launch.env);
        let boxes = OperandView::new(&suppress.boxes, launch.args[0], launch.env);
        let keep = OperandView::new(&suppress.keep, launch.args[1], launch.env);
        // SAFETY: the workspace holds the most boxes there can be, and belongs to this launch.
        let rects =
            unsafe { std::slice::from_raw_parts_mut(launch.workspace.cast::<Rect>(), count) };
        for (i, rect) in rects.iter_mut().enumerate() {
            let side = |k: isize| {
                let at = i as isize * boxes.strides[0] + k * boxes.strides[1];
                // SAFETY: four numbers of one box.
                f32::from_bits(unsafe { boxes.load(at) })
            };
            let [x0, y0, x1, y1] = [side(0), side(1), side(2), side(3)];
            *rect = [x0, y0, x1, y1, (x1 - x0) * (y1 - y0)];
        }
        let rects = &*rects;
        let place = |i: usize| keep.element::<u8>(i as isize * keep.strides[0]);
        // SAFETY: each of these touches one element of the result, which one worker at a time has.
        let (stays, set) = (
            |i: usize| unsafe { place(i).read() } != 0,
            |i: usize, to: u8| unsafe { place(i).write(to) },
        );
        (0..count).for_each(|i| set(i, 1));
        let covers = |i: usize, j: usize| overlap(&rects[i], &rects[j]) > suppress.threshold;
        for from in (0..count).step_by(BLOCK) {
            let end = (from + BLOCK).min(count);
            for j in from + 1..end {
                if (from..j).any(|i| stays(i) && covers(i, j)) {
                    set(j, 0);
                }
            }
            launch.team.run((count - end).div_ceil(CHUNK), &|chunk, _| {
                let first = end + chunk * CHUNK;
                for j in first..(first + CHUNK).min(count) {
                    if stays(j) && (from..end).any(|i| stays(i) && covers(i, j)) {
                        set(j, 0);
                    }
                }
            });
        }
    }
}

/// Intersection over union of two boxes; NaN if both are empty, which is above no threshold.
fn overlap(a: &Rect, b: &Rect) -> f32 {
    let width = (a[2].min(b[2]) - a[0].max(b[0])).max(0.0);
    let height = (a[3].min(b[3]) - a[1].max(b[1])).max(0.0);
    let shared = width * height;
    shared / (a[4] + b[4] - shared)
}
