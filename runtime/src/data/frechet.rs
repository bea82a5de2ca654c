//! The distance of two sets of features, by which generated images are judged.

use ndarray::{Array2, ArrayView2, Axis};

use crate::error::{Error, Result};

/// Most sweeps over a matrix whose eigenvalues are wanted; a dozen are usual.
const SWEEPS_MAX: usize = 64;

/// The Fréchet distance of normal distributions with the means and covariances of two sets of
/// features, one example in a row: |μ₁ − μ₂|² + tr(Σ₁ + Σ₂ − 2 (Σ₁Σ₂)^½), with covariances over
/// n − 1. Of the features of an Inception network it is the FID (Heusel et al. 2017).
///
/// The work grows with the cube of the number of features.
///
/// ```
/// # use slabwise::data::frechet_distance;
/// use ndarray::arr2;
/// let (found, wanted) = (arr2(&[[0.0, 1.0], [2.0, 5.0]]), arr2(&[[3.0, 1.0], [5.0, 5.0]]));
/// assert!((frechet_distance(found.view(), wanted.view())? - 9.0).abs() < 1e-6);
/// # Ok::<(), slabwise::Error>(())
/// ```
///
/// # Errors
/// Fewer than two examples in a set, different numbers of features, or features that are not finite.
pub fn frechet_distance(a: ArrayView2<'_, f32>, b: ArrayView2<'_, f32>) -> Result<f64> {
    for (name, set) in [("first", &a), ("second", &b)] {
        if set.nrows() < 2 || !set.iter().all(|x| x.is_finite()) {
            return Err(Error::Value(format!(
                "frechet_distance: the {name} set has {} examples; at least two of finite features \
                 are needed",
                set.nrows()
            )));
        }
    }
    if a.ncols() != b.ncols() {
        return Err(Error::Value(format!(
            "frechet_distance: {} features and {}",
            a.ncols(),
            b.ncols()
        )));
    }
    let [(mean_a, of_a), (mean_b, of_b)] = [a, b].map(moments);
    let apart: f64 = (&mean_a - &mean_b).iter().map(|d| d * d).sum();
    let trace = |m: &Array2<f64>| m.diag().sum();
    // Σ₁Σ₂ has the eigenvalues of the symmetric Σ₁^½ Σ₂ Σ₁^½.
    let (mut values, vectors) = eigen(of_a.clone());
    values
        .iter_mut()
        .for_each(|value| *value = value.max(0.0).sqrt());
    let root = (&vectors * &ndarray::Array1::from(values)).dot(&vectors.t());
    let (joint, _) = eigen(root.dot(&of_b).dot(&root));
    let joint: f64 = joint.iter().map(|value| value.max(0.0).sqrt()).sum();
    Ok((apart + trace(&of_a) + trace(&of_b) - 2.0 * joint).max(0.0))
}

/// Means and covariances of the columns.
fn moments(set: ArrayView2<'_, f32>) -> (ndarray::Array1<f64>, Array2<f64>) {
    let set = set.mapv(f64::from);
    let mean = set.sum_axis(Axis(0)) / set.nrows() as f64;
    let rest = set - &mean;
    let covariance = rest.t().dot(&rest) / (rest.nrows() - 1) as f64;
    (mean, covariance)
}

/// Eigenvalues and, in columns, eigenvectors of a symmetric matrix, by rotations of two axes at a
/// time (Jacobi 1846).
fn eigen(mut m: Array2<f64>) -> (Vec<f64>, Array2<f64>) {
    let n = m.nrows();
    let mut vectors = Array2::eye(n);
    let all: f64 = m.iter().map(|x| x * x).sum();
    for _ in 0..SWEEPS_MAX {
        let beside = (0..n).flat_map(|p| (p + 1..n).map(move |q| (p, q)));
        let beside: f64 = beside.map(|at| m[at] * m[at]).sum();
        if beside <= 1e-26 * all {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                if m[[p, q]] == 0.0 {
                    continue;
                }
                let theta = (m[[q, q]] - m[[p, p]]) / (2.0 * m[[p, q]]);
                let t = theta.signum() / (theta.abs() + theta.hypot(1.0));
                let c = 1.0 / t.hypot(1.0);
                let s = t * c;
                for k in 0..n {
                    let (x, y) = (m[[k, p]], m[[k, q]]);
                    (m[[k, p]], m[[k, q]]) = (c * x - s * y, s * x + c * y);
                }
                for k in 0..n {
                    let (x, y) = (m[[p, k]], m[[q, k]]);
                    (m[[p, k]], m[[q, k]]) = (c * x - s * y, s * x + c * y);
                    let (x, y) = (vectors[[k, p]], vectors[[k, q]]);
                    (vectors[[k, p]], vectors[[k, q]]) = (c * x - s * y, s * x + c * y);
                }
            }
        }
    }
    (m.diag().to_vec(), vectors)
}

#[cfg(test)]
mod tests {
    use ndarray::Slice;

    use super::*;

    /// Features without a pattern, other ones for each factor.
    fn features(
        rows: usize,
        factors: [usize; 3],
        modulus: usize,
        by: f32,
        less: f32,
    ) -> Array2<f32> {
        let [i, j, both] = factors;
        Array2::from_shape_fn((rows, 4), |(row, column)| {
            ((row * i + column * j + row * column * both) % modulus) as f32 / by - less
        })
    }

    /// The numbers are NumPy's, with the eigenvalues of the product of the covariances.
    #[test]
    fn distances_are_those_of_normal_distributions() {
        let a = features(7, [37, 11, 5], 17, 4.0, 0.0);
        let b = features(7, [23, 7, 3], 19, 5.0, 1.0);
        let near = |found: Result<f64>, exact: f64| {
            let found = found.expect("they fit");
            assert!((found - exact).abs() < 1e-6, "{found}, not {exact}");
        };
        near(frechet_distance(a.view(), b.view()), 4.289_457_602_553_409);
        near(frechet_distance(b.view(), a.view()), 4.289_457_602_553_409);
        near(frechet_distance(a.view(), a.view()), 0.0);
        // Covariances without full rank.
        let three = Slice::from(..3);
        let few = |x: &Array2<f32>| x.slice_axis(Axis(0), three).to_owned();
        near(
            frechet_distance(few(&a).view(), few(&b).view()),
            10.555_681_746_898_825,
        );
    }

    #[test]
    fn sets_that_have_no_covariance_are_refused() {
        let a = features(3, [1, 2, 3], 5, 1.0, 0.0);
        let narrow = a.slice_axis(Axis(1), Slice::from(..3));
        let one = a.slice_axis(Axis(0), Slice::from(..1));
        let mut infinite = a.clone();
        infinite[[1, 1]] = f32::INFINITY;
        for (b, part) in [
            (narrow, "4 features and 3"),
            (one, "1 examples"),
            (infinite.view(), "finite"),
        ] {
            let error = frechet_distance(a.view(), b)
                .expect_err("refused")
                .to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
