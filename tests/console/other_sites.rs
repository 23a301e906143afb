//! Requests that other sites cause, and pages that embed the console.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener},
    thread,
};

use serde_json::json;

use super::{call, folder, send};
use crate::support::{Browser, Operator, Server, operator::OPERATE, server::agent};

const INSPECT: &str = r#"{"descriptor": {"domain": "shop", "entries": [{"key": "user", "value": "bob"}]}}"#;
const SWITCH_OFF: &str = r#"{"changes": [{"target": {"switch": {"everything": true}}, "value": "off"}]}"#;

#[test]
fn requests_of_other_sites_are_rejected() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    send(server, 9, "user", "bob");
    let (own, other) = (format!("http://{}", server.http), "http://evil.example");
    let token = format!("Bearer {OPERATE}");
    for headers in [
        &[("sec-fetch-site", "cross-site")][..],
        &[("sec-fetch-site", "same-site")],
        &[("sec-fetch-site", "cross-site"), ("origin", &own)],
        &[("origin", other)],
        &[("origin", "null")],
        &[("origin", &own.replace("http:", "https:").replace("127.0.0.1", "localhost"))],
    ] {
        for (method, body) in [("Inspect", INSPECT), ("ListTopEntities", "{}"), ("WatchActivity", "{}")] {
            let (code, text) = call(server, method, headers, body);
            assert_eq!((code, text.as_str()), (403, "requests of other sites are not allowed\n"), "{headers:?}");
        }
        // A token makes no difference.
        let with_token = [headers, &[("authorization", &token)]].concat();
        assert_eq!(call(server, "PutOverrides", &with_token, SWITCH_OFF).0, 403, "{headers:?}");
    }
    for headers in [&[][..], &[("sec-fetch-site", "same-origin")], &[("sec-fetch-site", "none")], &[("origin", &own)]] {
        let (code, text) = call(server, "Inspect", headers, INSPECT);
        assert!(code == 200 && text.contains("bob"), "{headers:?}: {code} {text}");
    }
    // After DNS rebinding, a page of evil.example has the origin of its requests, but names its own host.
    let rebinding = [("host", "evil.example"), ("origin", other), ("sec-fetch-site", "same-origin")];
    for method in ["Inspect", "ListTopEntities", "ListAuditLog", "PutOverrides"] {
        let (code, text) = call(server, method, &rebinding, INSPECT);
        assert!(code == 403 && !text.contains("bob"), "{method}: {code} {text}");
    }
    let (code, session) = call(server, "GetSession", &rebinding, "{}");
    assert!(code == 200 && session.contains("\"public\""), "{session}");
    assert_eq!(send(server, 1, "user", "bob"), 0, "no switch is off");
}

/// A page of another site can send a POST request with text without asking first.
#[test]
fn other_sites_cannot_use_up_limits_or_report_utilization() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    let hit = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"bob"}]}]}"#;
    let report = r#"{"reporter":"evil","utilization":1.0,"ttl":"10s"}"#;
    let own = format!("http://{}", server.http);
    let send = |path: &str, headers: &[(&str, &str)], body: &str| {
        let request = agent().post(server.url(path)).header("content-type", "text/plain");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        request.send(body.as_bytes()).unwrap().status().as_u16()
    };
    for headers in [
        &[("origin", "http://evil.example")][..],
        &[("origin", "null")],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site"), ("origin", &own)],
    ] {
        for (path, body) in [("/json", hit), ("/resources/db", report), ("/nowhere", "")] {
            assert_eq!(send(path, headers, body), 403, "{path} {headers:?}");
        }
    }
    assert!(server.get("/resources/db").contains("\"reporters\":0"), "{}", server.get("/resources/db"));
    // Gateways and tools send neither header, and a page of the service has its own origin.
    for headers in [&[][..], &[("origin", own.as_str())], &[("sec-fetch-site", "same-origin")]] {
        assert_ne!(send("/json", headers, hit), 403, "{headers:?}");
        assert_eq!(send("/resources/db", headers, report), 200, "{headers:?}");
    }
    // Other sites may have links to pages.
    let link = agent().get(server.url("/metrics")).header("sec-fetch-site", "cross-site").call().unwrap();
    assert_eq!(link.status().as_u16(), 200);
}

#[test]
fn every_response_has_the_headers_against_embedding() {
    let folder = folder();
    let [debug, metrics] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    let builder = Server::builder().rules(folder.path()).set("http.debug_addr", &debug.to_string());
    let operator = Operator::with(builder.set("http.metrics_addr", &metrics.to_string()));
    let own = operator.server.url("");
    let check = |url: &str, method: &str, header: (&str, &str), code: u16| {
        let response = match method {
            "GET" => agent().get(url).header(header.0, header.1).call(),
            _ => agent().post(url).header(header.0, header.1).send(&b"{}"[..]),
        };
        let response = response.unwrap();
        assert_eq!(response.status().as_u16(), code, "{url}");
        let text = |name: &str| response.headers().get(name).map_or("", |value| value.to_str().unwrap());
        let policy = text("content-security-policy");
        for directive in
            ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"]
        {
            assert!(policy.split("; ").any(|part| part == directive), "{url}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{url}: {policy}");
        assert_eq!(text("x-frame-options"), "DENY", "{url}");
        assert_eq!(text("x-content-type-options"), "nosniff", "{url}");
        assert_eq!(text("cross-origin-resource-policy"), "same-origin", "{url}");
        assert!(response.headers().get("access-control-allow-origin").is_none(), "{url}");
    };
    let none = ("accept", "*/*");
    for path in ["/healthcheck", "/readyz", "/metrics", "/stats", "/rlconfig", "/resources/db"] {
        check(&format!("{own}{path}"), "GET", none, 200);
    }
    check(&format!("{own}/json"), "POST", none, 400);
    check(&format!("{own}/json"), "POST", ("origin", "http://evil.example"), 403);
    check(&format!("{own}/nowhere"), "GET", none, 404);
    check(&format!("{own}/metrics"), "POST", none, 405);
    check(&format!("http://{debug}/"), "GET", none, 200);
    check(&format!("http://{debug}/nowhere"), "GET", none, 404);
    check(&format!("http://{metrics}/metrics"), "GET", none, 200);
    for base in [&own, &operator.addr] {
        check(&format!("{base}/"), "GET", none, 200);
        check(&format!("{base}/console/app.js"), "GET", none, 200);
        check(&format!("{base}/console/nothing.js"), "GET", none, 404);
        check(&format!("{base}/v1/GetSession"), "POST", ("sec-fetch-site", "cross-site"), 403);
        check(&format!("{base}/v1/GetSession"), "POST", ("authorization", "Bearer wrong-0123456789"), 401);
        let token = format!("Bearer {OPERATE}");
        check(&format!("{base}/v1/GetSession"), "POST", ("authorization", &token), 200);
        check(&format!("{base}/v1/Nothing"), "POST", ("authorization", &token), 404);
        check(&format!("{base}/v1/Inspect"), "POST", ("authorization", &token), 400);
    }
}

/// Serves one page of another origin until the test ends.
fn serve(page: String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let page = page.clone();
            thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                let head = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\ncontent-length";
                let _ = write!(stream, "{head}: {}\r\n\r\n{page}", page.len());
            });
        }
    });
    address
}

#[test]
fn a_page_of_another_origin_gets_nothing() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    send(&server, 9, "user", "bob");
    let port = server.http.port();
    // `localhost` and 127.0.0.1 are different sites; two ports of one name are different origins of one site.
    let console = format!("http://127.0.0.1:{port}");
    let address = serve(format!(
        "<!doctype html><title>other</title><link rel=icon href=data:,><iframe src='{console}/'></iframe>"
    ));
    let browser = Browser::start();
    for text in
        ["X-Frame-Options", "frame-ancestors", "CORS policy", "net::ERR_", "the server responded with a status of 403"]
    {
        browser.expect_log(text);
    }
    for host in ["127.0.0.1", "localhost"] {
        browser.open(&format!("http://{host}:{}/", address.port()));
        browser.wait_for("document.readyState === 'complete'");
        let attempts = browser.run_async(
            "const [console, done] = arguments;
             const attempt = async (mode, type) => {
               const headers = { 'content-type': type };
               try {
                 const response = await fetch(`${console}/v1/ListTopEntities`, { method: 'POST', mode, headers, body: '{}' });
                 return response.type + (await response.text());
               } catch (error) { return error.name; }
             };
             const script = (name) => new Promise((resolve) => {
               const element = document.createElement('script');
               element.onload = () => resolve('loaded');
               element.onerror = () => resolve('blocked');
               element.src = `${console}/console/${name}`;
               document.body.append(element);
             });
             (async () => done([await attempt('cors', 'application/json'), await attempt('cors', 'text/plain'),
               await attempt('no-cors', 'text/plain'), await script('vendor/uplot.js')]))();",
            &json!([console]),
        );
        // `TypeError`: the browser withholds the response. The script is blocked by its resource policy.
        assert_eq!(attempts, json!(["TypeError", "TypeError", "TypeError", "blocked"]), "{host}");
        browser.enter_frame();
        let frame = browser.value("[location.protocol, document.querySelectorAll('#app, header, main').length]");
        assert_eq!(frame, json!(["chrome-error:", 0]), "{host}");
    }
    // The same page shows the console if it is not embedded.
    browser.open(&format!("{console}/"));
    browser.wait_for_text("[data-test=denied-entities]", &["user=bob"]);
}
