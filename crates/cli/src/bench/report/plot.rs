//! A plot as SVG: lines over block sizes.

use std::fmt::Write;

use crate::units;

/// The outer size, and what the labels need of it.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;

/// Colours that are told apart with any kind of colour vision (Okabe and Ito, 2008).
const COLOURS: &[&str] = &["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// How a line is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stroke {
    Solid,
    Dashed,
    Dotted,
}

/// One line.
#[derive(Debug, Clone)]
pub(super) struct Series {
    pub(super) label: String,
    /// Which colour; lines that belong together share one.
    pub(super) colour: usize,
    pub(super) stroke: Stroke,
    /// Bytes and values, in the order of bytes.
    pub(super) points: Vec<(u64, f64)>,
}

/// How values become heights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    /// From zero on.
    Linear,
    /// By powers of ten.
    Log,
}

/// One plot.
#[derive(Debug, Clone)]
pub(super) struct Plot<'a> {
    pub(super) title: &'a str,
    pub(super) scale: Scale,
    pub(super) series: &'a [Series],
}

/// The colour of series number `index`.
pub(super) fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

impl Plot<'_> {
    /// The plot as an `svg` element.
    pub(super) fn render(&self) -> String {
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\">\n\
             <text class=\"title\" x=\"{LEFT}\" y=\"18\">{}</text>\n",
            escape(self.title)
        );
        let mut sizes: Vec<u64> =
            self.series.iter().flat_map(|series| &series.points).map(|point| point.0).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let values = || self.series.iter().flat_map(|series| &series.points).map(|point| point.1);
        let axis = Axis::new(self.scale, values());
        let (low, high) = match (sizes.first(), sizes.last()) {
            (Some(&low), Some(&high)) => (low as f64, high as f64),
            _ => return svg + "</svg>\n",
        };
        let x = |bytes: u64| {
            let share = if high > low { (bytes as f64 / low).ln() / (high / low).ln() } else { 0.5 };
            LEFT + share * (WIDTH - LEFT - RIGHT)
        };
        let y = |value: f64| HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM);
        for tick in axis.ticks() {
            let at = y(tick);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.0
            );
        }
        // Labels that would overlap are left out.
        let mut free_from = f64::NEG_INFINITY;
        for &bytes in &sizes {
            let (at, label) = (x(bytes), units::size(bytes));
            let half = label.len() as f64 * 3.4;
            if at - half >= free_from {
                free_from = at + half + 4.0;
                let _ = writeln!(
                    svg,
                    "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
                    HEIGHT - BOTTOM + 18.0
                );
            }
        }
        for series in self.series {
            let points: Vec<String> = series
                .points
                .iter()
                .map(|&(bytes, value)| format!("{:.1},{:.1}", x(bytes), y(value)))
                .collect();
            let dash = match series.stroke {
                Stroke::Solid => "",
                Stroke::Dashed => " stroke-dasharray=\"7 5\"",
                Stroke::Dotted => " stroke-dasharray=\"2 4\"",
            };
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" stroke=\"{}\"{dash}><title>{}</title></polyline>",
                points.join(" "),
                colour(series.colour),
                escape(&series.label)
            );
            for (&(bytes, value), point) in series.points.iter().zip(&points) {
                let Some((cx, cy)) = point.split_once(',') else { continue };
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{cx}\" cy=\"{cy}\" r=\"2.5\" fill=\"{}\"><title>{}, {}: {value}</title></circle>",
                    colour(series.colour),
                    escape(&series.label),
                    units::size(bytes)
                );
            }
        }
        svg + "</svg>\n"
    }
}

/// The range of values that a plot shows.
#[derive(Debug, Clone, Copy)]
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Axis {
    fn new(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let (mut least, mut most) = (f64::INFINITY, 0.0_f64);
        for value in values.filter(|value| value.is_finite() && *value > 0.0) {
            least = least.min(value);
            most = most.max(value);
        }
        if most == 0.0 {
            (least, most) = (0.5, 1.0);
        }
        match scale {
            Scale::Linear => {
                let step = step(most);
                Self { scale, low: 0.0, high: (most / step).ceil() * step }
            }
            Scale::Log => {
                let (low, high) = (10_f64.powf(least.log10().floor()), 10_f64.powf(most.log10().ceil()));
                Self { scale, low, high: high.max(low * 10.0) }
            }
        }
    }

    /// How far up a value stands, from 0 to 1.
    fn share(self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => value / self.high,
            Scale::Log if value <= 0.0 => 0.0,
            Scale::Log => (value / self.low).log10() / (self.high / self.low).log10(),
        };
        share.clamp(0.0, 1.0)
    }

    fn ticks(self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = step(self.high);
                (0..=(self.high / step).round() as u32).map(|index| tidy(f64::from(index) * step)).collect()
            }
            Scale::Log => {
                let decades = (self.high / self.low).log10().round() as i32;
                (0..=decades).map(|index| tidy(self.low * 10_f64.powi(index))).collect()
            }
        }
    }
}

/// A step of 1, 2 or 5 times a power of ten that makes four to nine steps up to `most`.
fn step(most: f64) -> f64 {
    let decade = 10_f64.powf((most / 5.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * decade)
        .find(|step| most / step <= 7.5)
        .unwrap_or(decade)
}

/// Without the last digits, which rounding made.
fn tidy(value: f64) -> f64 {
    format!("{value:.9}").parse().unwrap_or(value)
}

/// Text that stands for itself in HTML.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_axis_begins_at_zero_with_round_steps() {
        let axis = Axis::new(Scale::Linear, [3.0, 12.3].into_iter());
        assert_eq!(axis.ticks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]);
        assert!((axis.share(7.0) - 0.5).abs() < 1e-9);
        assert_eq!(Axis::new(Scale::Linear, std::iter::empty()).ticks().first(), Some(&0.0));
    }

    #[test]
    fn a_logarithmic_axis_has_whole_decades() {
        let axis = Axis::new(Scale::Log, [0.3, 4000.0].into_iter());
        assert_eq!(axis.ticks(), [0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0]);
        assert_eq!((axis.share(0.0), axis.share(0.1), axis.share(10_000.0)), (0.0, 0.0, 1.0));
    }

    #[test]
    fn every_point_is_drawn_within_the_frame() {
        let points = vec![(4096, 0.5), (1 << 20, 9.0), (256 << 20, 12.0)];
        let series = [Series { label: "a < b".into(), colour: 0, stroke: Stroke::Dashed, points }];
        let svg = Plot { title: "GB/s", scale: Scale::Linear, series: &series }.render();
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains("a &lt; b, 4 KiB: 0.5") && svg.contains("stroke-dasharray"));
        for coordinate in svg.split("cx=\"").skip(1) {
            let x: f64 = coordinate.split('"').next().unwrap().parse().unwrap();
            assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x}");
        }
    }
}
